"""Images in prompts: read when a request comes, encoded in the step that computes them."""
