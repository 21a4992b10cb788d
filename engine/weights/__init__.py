"""From the name of a model to a ready folder: config.json, *.safetensors, tokenizer.json, chat template.

Importing this package loads neither torch nor any weights.
"""

from engine.weights.resolve import resolve

__all__ = ["resolve"]
