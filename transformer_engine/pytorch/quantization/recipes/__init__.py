"""Recipes: formats, the quantizers of a product, their states for clients, and the capabilities of the machine."""
