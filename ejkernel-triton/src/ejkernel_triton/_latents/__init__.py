"""What attention over latents shares: configs, tiles, and the sum of split results.

All heads of a token read the same latents, so they are the rows of one tile; a latent is loaded once, as key and as value.
"""
