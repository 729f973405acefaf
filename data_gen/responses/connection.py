"""Connections to completions servers: API keys, proxies, clients."""

import os
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import openai

from configs.schema import ServerConfig

_OFFICIAL = "https://api.openai.com/"


def key_for(url: str, variable: str | None) -> str:
    """The API key for a server: of the named variable; by default OPENAI_API_KEY, for the official address only."""
    if variable is None:
        if not url.startswith(_OFFICIAL) or "OPENAI_API_KEY" not in os.environ:
            return "none"
        variable = "OPENAI_API_KEY"
    if variable not in os.environ:
        raise ValueError(
            f"data.server.api_key_variable is {variable}, but that environment variable is not set; set it"
        )
    key = os.environ[variable]
    if not key or not key.isascii() or not key.isprintable() or key != key.strip():
        problem = "is empty" if not key.strip() else "has a line break, a space at an end or a character beyond ASCII"
        raise ValueError(f"the API key in the environment variable {variable} {problem}; set it to the key alone")
    return key


def client_of(url: str, key: str, config: ServerConfig) -> openai.AsyncOpenAI:
    """The client for a server; ValueError for a proxy that it cannot use."""
    try:
        return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=config.max_retries, timeout=config.timeout_s)
    except (ImportError, ValueError, openai.OpenAIError) as error:  # a SOCKS proxy without socksio, a malformed URL
        raise ValueError(
            f"no request to {url} can be made: {' '.join(str(error).split())}; check the proxy in ALL_PROXY, "
            "HTTP_PROXY and HTTPS_PROXY, or unset them"
        ) from error


def proxy_of(url: str) -> str:
    """ ", through the proxy X" if requests to the address use one."""
    address = urlsplit(url)
    proxy = getproxies().get(address.scheme) or getproxies().get("all")
    if proxy is None or proxy_bypass(address.netloc):
        return ""
    return f", through the proxy {proxy}, which NO_PROXY can except"
