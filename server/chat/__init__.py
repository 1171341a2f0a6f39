"""Text on one side, token ids on the other: everything between a chat request and the engine's tokens.

vocabulary.Vocabulary.load(path)            tokens, chat template and names of a pack
template.Chat(vocabulary).prompt(messages)  a conversation -> Prompt (ids and the parser's starting state)
effort.thinking_from_effort(word)           the dialects' spellings of thinking effort -> Thinking
output.OutputParser(vocabulary, ...)        token ids -> events (events.py) and the finish reason
stream.TextStream(vocabulary, stop)         token ids -> plain text up to a stop string
errors                                      RequestError and TemplateError are the client's fault (400)
"""
