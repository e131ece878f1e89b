"""What a server half is, and what it may say to users and hear from them."""
