"""A continuous-batching engine on ejkernel's paged operations, and an HTTP endpoint in OpenAI's completion format."""
