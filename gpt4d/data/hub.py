"""The Hugging Face hub, or its local cache if there is no network."""

from functools import cache

_TIMEOUT_S = 5.0  # for one small request; without a network, the address is usually unknown within milliseconds


@cache
def unreachable() -> str | None:
    """Return why the hub cannot be used, or None if it answers. Call it before a library contacts the hub.

    If it does not answer, the libraries use their cache alone until the process ends. By default, they repeat each
    request for up to 25 s and print every attempt.
    """
    from huggingface_hub import constants, get_session

    if constants.is_offline_mode():
        return "not in the cache, and HF_HUB_OFFLINE is set"
    try:
        get_session().head(constants.ENDPOINT, timeout=_TIMEOUT_S)
    except Exception as error:  # its class depends on the version of huggingface_hub
        constants.HF_HUB_OFFLINE = True
        reason = " ".join(str(error).split())
        return f"not in the cache, and there is no network: {constants.ENDPOINT} cannot be reached, {reason}"
    return None
