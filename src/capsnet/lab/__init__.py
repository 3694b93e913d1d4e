"""The Lab: a page on which one draws a digit and watches a capsule network think."""
