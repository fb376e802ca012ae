"""From a public call to a dispatched request: canonicalise -> differentiate -> batch -> partition -> dispatch."""
