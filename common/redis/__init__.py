"""The one client of Redis servers and Clusters, with a policy for each plane: persist, or fail fast."""
