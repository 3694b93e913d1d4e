"""What all experiments share: plan, conduct, results, networks and the results page."""
