"""Program that decodes one file by libsndfile, in a process of its own: what its libraries do with
a hostile file, crash, hang, take memory or print, happens here and not in the server.

Reads the file at descriptor 0, and writes to descriptor 1 the rate and the number of channels, two
int32, and then the samples, float32 of all channels by turns. Exits with 0 if it was read to its
end. Imports nothing of aioinfer: `media.sound` runs it for each file.
"""

from __future__ import annotations

import os
import resource
import struct
import sys

import soundfile

#: Formats that are read, of all that libsndfile knows.
_FORMATS = ("WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3")
_MAX_CHANNELS = 32
#: Samples that are decoded at a time, of all channels.
_BLOCK = 2**16
#: Bounds of the process: seconds of CPU time, and bytes of memory, the interpreter's among them.
_MAX_CPU_S, _MAX_BYTES = 120, 2**28


def main() -> None:
    """See the module."""
    for limit, bound in (
        (resource.RLIMIT_CPU, _MAX_CPU_S), (resource.RLIMIT_DATA, _MAX_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):  # fmt: skip
        resource.setrlimit(limit, (bound, bound))
    # libsndfile writes notes to the standard output
    output = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with soundfile.SoundFile(0, closefd=False) as sound:
        if sound.format not in _FORMATS or not 1 <= sound.channels <= _MAX_CHANNELS:
            sys.exit(1)
        output.write(struct.pack("<2i", sound.samplerate, sound.channels))
        # a file that was cut has fewer samples than it says
        while len(block := sound.read(_BLOCK // sound.channels, "float32", always_2d=True)):
            output.write(block.tobytes())


if __name__ == "__main__":
    main()
