"""The one script for a machine with a GPU: are the kernels right, and how fast is everything?"""
