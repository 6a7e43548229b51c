"""Passes of models of Llama's kind on a GPU by kernels of our own: eight launches a layer instead of some fifty."""
