"""The models that vLLM loads, by the name of their tests."""

from __future__ import annotations

from tests.oracles.vllm_peer.embeddings import EMBEDDINGS
from tests.oracles.vllm_peer.pictures import PICTURES
from tests.oracles.vllm_peer.remote_code import REMOTE_CODE
from tests.oracles.vllm_peer.remote_pictures import REMOTE_PICTURES
from tests.oracles.vllm_peer.sound import SOUND
from tests.oracles.vllm_peer.text import TEXT

MODELS = TEXT | REMOTE_CODE | PICTURES | REMOTE_PICTURES | SOUND | EMBEDDINGS
