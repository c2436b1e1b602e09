"""Model families of the transformers library and of this project, cut into parts."""
