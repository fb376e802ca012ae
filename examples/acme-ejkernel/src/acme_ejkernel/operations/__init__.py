"""Operations of our own: each folder is one, with its contract, its reference and its cases."""
