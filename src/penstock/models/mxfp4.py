"""Experts in MXFP4 on a GPU: codes of four bits, and a power of two for each 32 of them, as kernels read them."""

# E experts, O outputs, I inputs, B blocks of 32 inputs, G groups of 128

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.errors import UnsupportedModel
from penstock.models.quantization import CARD_GROUP, GROUP

PARTS = CARD_GROUP // GROUP
VALUES = tuple(sign * value for sign in (1.0, -1.0) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
BIAS = 126  # a code that is read as bits of a float is too small by two to this power
LARGEST_POWER = 254 - BIAS


def mxfp4_values(codes: torch.Tensor, powers: torch.Tensor) -> torch.Tensor:
    """Float32 values of packed codes, the low half of a byte first, scaled by 2 ** (power - 127) per 32 of them."""
    values = torch.tensor(VALUES, device=codes.device)[torch.stack([codes & 15, codes >> 4], -1).int()]
    return torch.ldexp(values.view(-1, GROUP), (powers.int() - 127)[:, None]).view(-1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4Matrices:
    """A matrix for each expert. Alternating gates and what they gate lie as halves.

    A word holds a code of each quarter of a group, whose outputs lie side by side; four bytes hold its exponents.
    """

    words_EGOW: torch.Tensor  # int16
    factors_EGO: torch.Tensor  # int32
    num_inputs: int
    is_alternating: bool  # in the checkpoint

    @classmethod
    def empty(
        cls, num_experts: int, num_outputs: int, num_inputs: int, *, is_alternating: bool, device: torch.device
    ) -> Mxfp4Matrices:
        shape = (num_experts, -(-num_inputs // CARD_GROUP), num_outputs)
        return cls(
            words_EGOW=torch.empty(*shape, GROUP, dtype=torch.int16, device=device),
            factors_EGO=torch.empty(shape, dtype=torch.int32, device=device),
            num_inputs=num_inputs,
            is_alternating=is_alternating,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        num_experts, _, num_outputs = self.factors_EGO.shape
        return num_experts, num_outputs, self.num_inputs

    def take(self, expert: int, codes_OBb: torch.Tensor, powers_OB: torch.Tensor) -> None:
        """Takes the matrix of one expert: bytes of 32 values each, the low half of a byte first, and their powers."""
        if (largest := int(powers_OB.max())) > LARGEST_POWER:
            raise UnsupportedModel(
                f"A block of experts is scaled by 2 ** {largest - 127}, and a card multiplies codes up to 2 ** "
                f"{LARGEST_POWER - 127}; load the model with --quantize none, which expands them."
            )
        device, (_, num_groups, num_outputs) = self.words_EGOW.device, self.factors_EGO.shape
        codes_OBb, powers_OB = (self._in_order(part.to(device)) for part in (codes_OBb, powers_OB))
        codes = torch.zeros(num_outputs, num_groups * PARTS, GROUP, dtype=torch.int32, device=device)
        codes[:, : codes_OBb.shape[1]] = torch.stack([codes_OBb & 15, codes_OBb >> 4], -1).flatten(2)
        first, second, third, last = codes.view(num_outputs, num_groups, PARTS, GROUP).unbind(2)
        words = _apart(first, 15, 6) | _apart(second, 12, 3) | _apart(third, 9, 0)
        words |= _apart(last, 14, 10) & 0x4C00 | (last & 4) << 11  # what the other three leave free
        self.words_EGOW[expert] = words.to(torch.int16).transpose(0, 1)
        factors = torch.zeros(num_outputs, num_groups * PARTS, dtype=torch.uint8, device=device)
        factors[:, : powers_OB.shape[1]] = powers_OB + BIAS
        self.factors_EGO[expert] = factors.view(torch.int32).t()

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([rows[::2], rows[1::2]]) if self.is_alternating else rows


def _apart(codes: torch.Tensor, sign: int, rest: int) -> torch.Tensor:
    """Puts a code's sign there, and the three bits that it is followed by there."""
    return (codes >> 3) << sign | (codes & 7) << rest
