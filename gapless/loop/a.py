import torch
import msgspec
from gapless.loop import b
