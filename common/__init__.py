"""What both services share. Imports neither of them."""
