"""Log-mel spectrograms of sound as Whisper takes them (Radford et al. 2022): 25 ms windows every
10 ms, mel filters of Slaney's scale and norm, logarithms within 8 decades of the loudest."""

from __future__ import annotations

import torch

from aioinfer.models.source import SAMPLE_RATE

#: Samples of a window, and from one window to the next.
WINDOW, HOP = 400, 160
# Slaney's scale: linear up to 1000 Hz, 15 mels there; logarithmic above, 27 mels for a factor of
# 6.4
_BREAK_HZ, _BREAK_MEL = 1000.0, 15.0
_MELS_A_FACTOR, _FACTOR = 27.0, 6.4


def log_mel(samples: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    """Returns the spectrogram float32 [B, mels, n / HOP] of samples float32 [B, n], of which each
    row is scaled by its own maximum; `filters` are those of `mel_filters`."""
    window = torch.hann_window(WINDOW, device=samples.device)
    spectrum = torch.stft(samples, WINDOW, HOP, window=window, return_complex=True)
    power = spectrum[..., :-1].abs().square()
    decades = (filters @ power).clamp(min=1e-10).log10()
    loudest = decades.amax(dim=(1, 2), keepdim=True)
    return (torch.maximum(decades, loudest - 8.0) + 4.0) / 4.0


def mel_filters(num_mels: int, device: torch.device) -> torch.Tensor:
    """Returns triangular filters float32 [num_mels, WINDOW / 2 + 1] over the frequencies of a
    window, whose areas are equal (Slaney's norm)."""
    highest = _BREAK_MEL + _MELS_A_FACTOR * _log(SAMPLE_RATE / 2 / _BREAK_HZ) / _log(_FACTOR)
    mels = torch.linspace(0.0, float(highest), num_mels + 2, dtype=torch.float64)
    above = _BREAK_HZ * _FACTOR ** ((mels - _BREAK_MEL) / _MELS_A_FACTOR)
    edges = torch.where(mels < _BREAK_MEL, mels * (_BREAK_HZ / _BREAK_MEL), above)
    bins = torch.linspace(0.0, SAMPLE_RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    widths = edges.diff()
    slopes = edges[:, None] - bins
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    filters = torch.minimum(rising, falling).clamp(min=0) * (2 / (edges[2:] - edges[:-2]))[:, None]
    return filters.float().to(device)


def _log(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64).log()
