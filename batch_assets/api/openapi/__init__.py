"""The service's description of itself: OpenAPI and the page `/docs`.

`openapi_document` puts the shapes of answers and the errors into the document, and `docs_page` shows it without
anything from elsewhere.
"""

__all__ = ["docs_page", "openapi_document"]
