import torch.nn
