"""Types that the wire and the engine share."""
