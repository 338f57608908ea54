;; Timers, a process that sorts, regular expressions and buffers, and garbage.
(require 'cl-lib)
(defvar ticks 0)
(defvar answer "")
(run-with-timer 0.01 0.01 (lambda () (setq ticks (1+ ticks))))
(defvar cat (make-process :name "cat" :command '("cat") :connection-type 'pipe
                          :filter (lambda (_ text) (setq answer (concat answer text)))))
(defun work (step)
  (with-temp-buffer
    (dotimes (number 1500)
      (insert (format "%d word%d\n" (% (+ step (* number 7919)) 1009) number)))
    (sort-numeric-fields 1 (point-min) (point-max))
    (goto-char (point-min))
    (while (re-search-forward "\\([0-9]+\\) word\\([0-9]+\\)" nil t)
      (replace-match "\\2:\\1"))
    (secure-hash 'sha256 (current-buffer))))
(cl-loop
 for step from 1 do
 (setq answer "")
 (process-send-string cat (concat (work step) "\n"))
 (while (not (string-suffix-p "\n" answer))
   (accept-process-output nil 0.05))
 (write-region (format "%d %s" step answer) nil "steps" t 'silent)
 (when (file-exists-p "stop")
   (kill-emacs (if (> ticks 0) 0 5))))
