"""A decoder link that computes in the caller's process and remembers what went through it."""

import queue

from client_pipeline.link.base import Gradient


class LocalHead:
    """DecoderLink over a HeadTrainer, for tests of the pipeline alone."""

    def __init__(self, trainer):
        self.trainer = trainer
        self.outputs = []
        self.waiting = queue.Queue()
        self.tied = {}

    def begin_step(self, step, num_micro_batches, total_weight):
        self.step, self.m, self.weight = step, num_micro_batches, total_weight

    def send_tied(self, tied):
        self.tied = tied

    def receive_tied(self):
        return self.trainer.tied_gradient(self.step.cluster)

    def send(self, micro_batch, hidden_BTD, mask_BT, targets):
        self.outputs.append(hidden_BTD)
        self.waiting.put((micro_batch, hidden_BTD, mask_BT, targets))

    def receive(self):
        i, hidden, mask, targets = self.waiting.get(timeout=120)
        tensor, loss = self.trainer.gradient(self.step, i, hidden, mask, targets, self.weight, self.tied)
        norm = self.trainer.gradient_norm_sq(self.step.cluster) if i == self.m - 1 else None
        return Gradient(micro_batch=i, tensor=tensor, loss_sum=loss, norm_sq=norm)

    def drop_step(self):
        self.trainer.discard(self.step.cluster)

    def end_step(self, scale):
        pass

    def close(self):
        pass
