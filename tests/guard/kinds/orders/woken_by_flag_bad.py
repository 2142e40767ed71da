"""A worker sets a plain attribute when its rows are there, and the main thread polls that: nothing orders the two."""

import threading
import time

import torch


class Rows:
    def __init__(self):
        self.memory = torch.zeros(8, pin_memory=True)  # san: ok(once, at set-up)
        self.ready = False

    def fill(self):
        self.memory.fill_(3.0)
        self.ready = True


rows = Rows()
worker = threading.Thread(target=rows.fill)
worker.start()
while not rows.ready:
    time.sleep(0.001)
x = rows.memory.to("cuda", non_blocking=True)  # finds: race
worker.join()
