"""From tokens to text: detokenizing, stop strings, the choices of a request."""
