"""Parts of a model where the kernels of these tests run: on the card, or on the CPU in the interpreter."""

import dataclasses

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_device(part):
    """The same weights, where the kernels run."""
    changes = {}
    for field in dataclasses.fields(part):
        value = getattr(part, field.name)
        if isinstance(value, torch.Tensor):
            changes[field.name] = value.to(DEVICE)
        elif dataclasses.is_dataclass(value) and field.name != "spec":
            changes[field.name] = on_device(value)
    return dataclasses.replace(part, **changes)
