"""Where training starts: weights that exist, and adapters on them."""
