"""The object tier: records in an object store (S3, GCS, Azure, a folder) that several machines share.

Below the SSD: what this machine lacks of a prompt is looked for there, downloaded, verified as a file would be, and
enters the store like records of its own; what becomes durable here is uploaded in the background. Nothing there is
ever deleted by who reads, and every fault is a miss. ``names`` says what objects are called, ``seal`` how they are
encrypted, ``place`` how the store is reached, ``found`` what is known of a prompt, ``tier`` what a request asks,
``uploads`` what is sent.
"""
