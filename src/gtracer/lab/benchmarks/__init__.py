"""What a step costs, measured side by side in one run."""
