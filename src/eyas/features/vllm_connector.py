"""vLLM's connector for hidden states, for machines without CUDA: loaded by vLLM itself, see `engines.vllm_command`."""

import os

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as stock


class Written:
    """What stands for the CUDA event of a copy that is over."""

    def query(self) -> bool:
        return True


class HiddenStatesConnector(stock.ExampleHiddenStatesConnector):
    """The stock one copies on a CUDA stream and writes in a thread; without CUDA this writes at once."""

    def _submit_async_write(self, pending: stock.PendingSave) -> None:
        if not self._is_tp_rank_zero or self._kv_cache is None or self._kv_cache.is_cuda:
            return super()._submit_async_write(pending)
        slots = torch.tensor(pending.block_ids)[:, None] * self._block_size + torch.arange(self._block_size)
        states = stock.extract_from_kv_cache(self._kv_cache, slots.flatten(), len(pending.token_ids))
        save_file({"hidden_states": states.contiguous(), "token_ids": pending.token_ids}, pending.filename)
        self._req_copy_events[pending.req_id] = Written()
        if (lock := self._lock_fds.pop(pending.req_id, None)) is not None:
            os.close(lock)
        return None
