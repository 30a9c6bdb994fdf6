"""One declarative rule table a model family."""
