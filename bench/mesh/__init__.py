"""Services of this checkout as local processes: start, ask, kill and measure them."""
