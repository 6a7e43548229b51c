"""What serves all other packages and knows none of them."""
