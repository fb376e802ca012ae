"""Language models of four kinds, trained with ejkernel or in plain JAX: `python -m ejkernel_train --help`."""
