"""Responses: results and answers as clients read them; no HTTP here."""
