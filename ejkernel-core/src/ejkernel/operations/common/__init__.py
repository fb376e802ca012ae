"""What several operations share: families of rows and rotations, pages, packed sequences, cases."""
