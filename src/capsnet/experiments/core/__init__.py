"""What the experiments share: plan, conduct, results, claims, networks, linear read-out and the results page."""
