"""What is made of several operations and collectives."""
