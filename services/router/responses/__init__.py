"""Responses: results and answers in the form that clients read; the HTTP around them is in `http`."""
