"""A cross-encoder for row Q2, trained offline on texts of installed packages: pages, questions, lists and training."""
