"""A continuous-batching engine on ejkernel's paged operations, and HTTP endpoints in OpenAI's formats."""
