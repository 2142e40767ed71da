"""How the demo model is made: the generator of its text, its network, its training and its evaluation."""
