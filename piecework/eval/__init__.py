"""How good a model's answers are: accuracy on GSM8K, perplexity of a text."""
