"""Model families, weights, and the attention seam."""
