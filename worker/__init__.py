"""The worker: runs calls in sandboxes, and measures and captures for the pipeline in the very same way."""
