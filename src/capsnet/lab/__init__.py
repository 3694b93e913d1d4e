"""The Lab: an interactive page that shows how a capsule network classifies a drawing."""
