"""What a trained model is for: predictions, an evaluation, an export to other formats."""
