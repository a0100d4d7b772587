"""The matrix of clients: packages that others write, in environments of their own, against this server."""
