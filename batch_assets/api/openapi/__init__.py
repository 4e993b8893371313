"""The service's description of itself: OpenAPI and the page `/docs`.

`documented_objects` are the shapes of answers, `openapi_document` puts them and the errors into the document, and
`docs_page` shows it without anything from elsewhere.
"""

__all__ = ["docs_page", "documented_objects", "openapi_document"]
