"""A port without a front."""


class ScriptedPort:
    """Its messages are known beforehand; it notes how long each look at it may wait, and what is sent."""

    open = clear = True

    def __init__(self, *messages):
        self.messages, self.waits, self.sent = list(messages), [], []

    def ring_with(self, ring):
        """The messages are those that are written down."""

    def wake(self):
        """Nothing waits here."""

    def receive(self, seconds):
        self.waits.append(seconds)
        return self.messages.pop(0) if self.messages else []

    def send(self, messages):
        self.sent += messages
