"""The workload `causal-lm`: the language models that the library transformers knows."""
