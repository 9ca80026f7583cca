"""The router: catalogues in a database, selection by SQL, placement, the API."""
